"""Nightshift: asynchronous reinforcement-learning post-training for language models, run as a service."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nightshift.client import Client as Client
    from nightshift.trainer import Trainer as Trainer

__version__ = "0.1.0"
__all__ = ["Client", "Trainer", "__version__"]


def __getattr__(name: str) -> Any:
    """Loads what is heavy when it is asked for: ``import nightshift`` alone stays cheap."""
    if name == "Client":
        from nightshift.client import Client

        return Client
    if name == "Trainer":
        from nightshift.trainer import Trainer

        return Trainer
    raise AttributeError(f"module 'nightshift' has no attribute {name!r}")
