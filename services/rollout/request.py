"""The request of the rollout route, checked."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import numpy as np

from nightshift.wire import codec
from nightshift.wire.errors import WireError
from nightshift.wire.experience import Ids
from services.rollout.compat import SALT, Sampling

_FIELDS = {
    "request_id",
    "token_ids",
    "flush_tokens",
    "max_tokens",
    "temperature",
    "stop_token_ids",
    "seed",
    "min_tokens",
    "ignore_eos",
}


@dataclass(frozen=True, slots=True)
class RolloutRequest:
    """One response to be drawn."""

    request_id: str
    token_ids: list[int]  # the prompt, and what was drawn of the response before
    flush_tokens: int  # a frame for each so many tokens; 0: one at the end
    sampling: Sampling


def salted(body: bytes, salt: str) -> bytes:
    """The JSON body of a request to one of vLLM's routes with ``salt`` before its own; as it was where there is none.

    What is no JSON object, or has a salt that is no text, passes as it is: vLLM refuses it.
    """
    try:
        values = json.loads(body) if salt else None
    except ValueError:
        return body
    if not isinstance(values, dict):
        return body
    own = values.get(SALT)
    if own is not None and (not isinstance(own, str) or not own):
        return body
    return json.dumps({**values, SALT: salt if own is None else f"{salt}/{own}"}).encode()


def parse_request(body: bytes) -> RolloutRequest:
    """Reads the msgpack body of a request.

    Raises:
        WireError: malformed, or with a field that is missing, unknown or of another type.
    """
    values = codec.unpack(body)
    if not isinstance(values, dict):
        raise WireError(f"request: {type(values).__name__}, expected a map")
    if unknown := sorted(str(name) for name in values.keys() - _FIELDS):
        raise WireError(f"request: unknown fields {unknown}")
    request_id = values.get("request_id")
    if not isinstance(request_id, str) or not request_id:
        raise WireError(f"request: request_id is {request_id!r}, expected text")
    ids = _ids(values.get("token_ids"), "token_ids")
    if not len(ids):
        raise WireError("request: token_ids is empty")
    stops = values.get("stop_token_ids")
    temperature = values.get("temperature", 1.0)
    if isinstance(temperature, bool) or not isinstance(temperature, int | float) or not 0 <= temperature < np.inf:
        raise WireError(f"request: temperature is {temperature!r}, expected a number from 0")
    ignore_eos = values.get("ignore_eos", False)
    if not isinstance(ignore_eos, bool):
        raise WireError(f"request: ignore_eos is {ignore_eos!r}, expected true or false")
    seed = values.get("seed")
    return RolloutRequest(
        request_id=request_id,
        token_ids=ids.tolist(),
        flush_tokens=_count(values.get("flush_tokens", 0), "flush_tokens"),
        sampling=Sampling(
            max_tokens=_count(values.get("max_tokens"), "max_tokens", least=1),
            temperature=float(temperature),
            stop_token_ids=() if stops is None else tuple(_ids(stops, "stop_token_ids").tolist()),
            seed=None if seed is None else _count(seed, "seed"),
            min_tokens=_count(values.get("min_tokens", 0), "min_tokens"),
            ignore_eos=ignore_eos,
        ),
    )


def _ids(value: Any, name: str) -> Ids:
    array = np.array(value, np.int32) if isinstance(value, list) and all(type(v) is int for v in value) else value
    if not isinstance(array, np.ndarray) or array.ndim != 1 or array.dtype != np.int32:
        raise WireError(f"request: {name} is no int32 array of one dimension")
    if (array < 0).any():
        raise WireError(f"request: {name} holds a negative id")
    return array


def _count(value: Any, name: str, least: int = 0) -> int:
    if type(value) is not int or value < least:
        raise WireError(f"request: {name} is {value!r}, expected an integer from {least}")
    return value
