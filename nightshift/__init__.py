"""Nightshift: asynchronous reinforcement-learning post-training for language models, run as a service."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nightshift.client import Client as Client

__version__ = "0.1.0"
__all__ = ["Client", "__version__"]


def __getattr__(name: str) -> Any:
    """Loads what is heavy when it is asked for: ``import nightshift`` alone stays cheap."""
    if name == "Client":
        from nightshift.client import Client

        return Client
    raise AttributeError(f"module 'nightshift' has no attribute {name!r}")
