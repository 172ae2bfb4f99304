"""What a few bytes of YAML may stand for, at each door that reads it."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from nightshift.cli.main import app
from nightshift.config.plain import MOST_NUMBER, fault_of_node, fault_of_numbers, fault_of_references

ALIASES = "a0: &a0 [x,x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"a{at}: &a{at} [{','.join([f'*a{at - 1}'] * 10)}]\n" for at in range(1, 9)
)
DOUBLING = "b0: xxxxxxxxxx\n" + "".join(f"b{at}: '${{b{at - 1}}}${{b{at - 1}}}'\n" for at in range(1, 40))
LISTS = "b0: [x, x]\n" + "".join(f"b{at}: ['${{b{at - 1}}}', '${{.0}}']\n" for at in range(1, 40))
#: Name -> document, and what is said about it.
BOMBS = {
    "aliases": (ALIASES, "larger or nested deeper"),
    "an alias of itself": ("a: &a [*a]\n", "stands within what it stands for"),
    "nesting": ("a: " + "[" * 5000, "nested too deeply"),
    "nested maps": ("a: " + "{a: " * 200 + "1" + "}" * 200, "nested"),
    "hexadecimal": (f"a: 0x{'f' * 20_000}\n", "a number of 20002 characters"),
    "sixties": (f"a: 1{':1' * 100_000}\n", "a number of 200001 characters"),
    "references": (DOUBLING, "stand for more than a job can be"),
    "a number": ("a: 0xfffffffffffffff\n", "'a' is a whole number of 60 bits"),
    "bytes": ("a: \ud800", "is not UTF-8 text"),
}
COMMON = "model: {path: 'builtin:smollm2-135m-instruct'}\n"


@pytest.mark.parametrize("command", ["plan", "import-verl", "submit"])
@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_is_a_refusal_at_every_command(tmp_path: Path, name: str, command: str) -> None:
    text, says = BOMBS[name]
    path = tmp_path / "job.yaml"
    head = "actor_rollout: {model: {path: x}}\n" if command == "import-verl" else f"name: x\n{COMMON}"
    path.write_bytes((head + text).encode(errors="surrogatepass"))
    arguments = [command, str(path), *(["--url", "http://127.0.0.1:1"] if command == "submit" else [])]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 2, (done.output, done.exception)
    assert says in " ".join(done.output.split()), done.output


def test_a_file_that_is_too_large_is_not_read_whole(tmp_path: Path) -> None:
    path = tmp_path / "verl.yaml"
    path.write_bytes(b"actor_rollout: {}\n" + b"#" * (2 << 20))
    done = CliRunner().invoke(app, ["import-verl", str(path)])
    assert (done.exit_code, "larger than a job file can be" in " ".join(done.output.split())) == (2, True), done.output


def test_what_people_write_is_read() -> None:
    shared = yaml.compose("a: &a {x: 1, y: [1, 2]}\nb: *a\nc: {<<: *a, z: 1.5e-3}\nt: 2001-01-01\n", yaml.SafeLoader)
    assert fault_of_node(shared) is None
    assert fault_of_node(None) is None
    assert fault_of_numbers({"a": [MOST_NUMBER, -MOST_NUMBER, True, "9" * 99, 1e300]}) is None
    assert fault_of_numbers({"a": [0, {"b": MOST_NUMBER + 1}]}) == (
        "a[1].b",
        "is a whole number of 54 bits, but must lie between -2^53 and 2^53",
    )


def test_references_are_counted_by_what_they_stand_for() -> None:
    assert fault_of_references({"a": "x" * 1000, "b": "${a}${a}", "c": {"d": "${..b}", "e": "${.d}"}}) is None
    assert fault_of_references({"a": "${b}", "b": "${a}"}) is None, "a circle is named by who resolves it"
    assert fault_of_references({"a": "${nosuch}", "b": "${oc.env:HOME}", "c": "${a"}) is None
    assert fault_of_references(yaml.safe_load(DOUBLING)) is not None
    sections = {
        "b0": {"x": "y" * 10},
        **{f"b{at}": {"p": f"${{b{at - 1}}}", "q": f"${{b{at - 1}}}"} for at in range(1, 30)},
    }
    assert fault_of_references(sections) is not None
    assert fault_of_references(yaml.safe_load(LISTS)) is not None, "also by a place in its own list"
