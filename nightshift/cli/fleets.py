"""``nightshift fleets``: rollout servers that jobs share, who has them, and what each job had."""

from __future__ import annotations

import time
from typing import Any

from nightshift.cli.output import EXIT_DONE, WAITING, duration, print_json, waiting
from nightshift.client import Client

_SHOWN = 20


def list_fleets(url: str | None, *, as_json: bool) -> int:
    """Prints all fleets with their servers."""
    with Client(url) as client, waiting(WAITING):
        found = client.fleets()
    if as_json:
        for fleet in found:
            print_json(fleet)
        return EXIT_DONE
    if not found:
        print("no fleets: nightshift up --fleets FILE, or PUT /v1/fleets/NAME")
    for fleet in found:
        lent = sum(server["lent"] for server in fleet["servers"])
        print(f"{fleet['name']}: {len(fleet['servers'])} servers, {lent} lent")
        for server in fleet["servers"]:
            print(f"  {server['name']:<16}  {server['url']:<32}  {_holder(server)}")
    return EXIT_DONE


def show_fleet(url: str | None, name: str, *, as_json: bool) -> int:
    """Prints what the running jobs have of one fleet, and its newest leases."""
    with Client(url) as client, waiting(WAITING):
        found = client.leases(name, limit=_SHOWN)
    if as_json:
        print_json(found)
        return EXIT_DONE
    total = sum(share["used"] for share in found["shares"])
    print(f"{'job':<40}  {'weight':>6}  {'held':>4}  {'owed':>5}  {'server-seconds':>14}  {'share':>6}")
    for share in found["shares"]:
        part = f"{share['used'] / total:.1%}" if total else "-"
        print(
            f"{_job(share):<40}  {share['weight']:>6g}  {share['held']:>4}  {share['owed']:>5.2f}  "
            f"{share['used']:>14.0f}  {part:>6}"
        )
    now = time.time()
    for lease in found["leases"]:
        if lease["ended"] is not None:
            state = f"ended after {duration(lease['ended'] - lease['since'])}: {lease['ended_why']}"
        elif lease["asked"] is not None:
            state = f"asked back {duration(now - lease['asked'])} ago: {lease['asked_why']}"
        else:
            state = f"for {duration(max(0.0, now - lease['since']))}"
        print(f"lease {lease['number']}: {lease['server']}, {_job(lease)}, {state}")
    return EXIT_DONE


def _job(entry: dict[str, Any]) -> str:
    return str(entry["job_id"] or "a job of another project")


def _holder(server: dict[str, Any]) -> str:
    health = "" if server["healthy"] else ", does not answer"
    return f"lent to {_job(server)}{health}" if server["lent"] else f"free{health}"
