"""The page at ``/``: a few files that come with the service."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from fastapi import APIRouter
from fastapi.responses import FileResponse

router = APIRouter(include_in_schema=False)
_FOLDER = Path(__file__).parent / "page"
_TYPES = {
    "app.js": "text/javascript",
    "api.js": "text/javascript",
    "draw.js": "text/javascript",
    "figures.js": "text/javascript",
    "fleets.js": "text/javascript",
    "style.css": "text/css",
}
_FRESH = {"Cache-Control": "no-cache"}


@router.get("/")
def page() -> FileResponse:
    """The page itself; it asks the API for everything that it shows."""
    return FileResponse(_FOLDER / "index.html", media_type="text/html", headers=_FRESH)


@router.get("/page/{name}")
def part(name: Literal["app.js", "api.js", "draw.js", "figures.js", "fleets.js", "style.css"]) -> FileResponse:
    """Its scripts and its style."""
    return FileResponse(_FOLDER / name, media_type=_TYPES[name], headers=_FRESH)
