"""A user's order of the prompts: a function that is called as (prompts, epoch) gives one number per prompt."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nightshift.data.preferences import Pair
from nightshift.data.prompts import Prompt
from nightshift.wire.errors import BadInputError, NightshiftError


def epoch_keys(
    function: Callable[..., Any], name: str, prompts: Sequence[Prompt] | Sequence[Pair]
) -> Callable[[int], NDArray[np.float64]]:
    """Sort keys of an epoch, from the user's function.

    It must depend on its arguments alone, since a resumed run calls it again for the same epoch.

    Args:
        function: called as (prompts, epoch), with epochs from 0.
        name: for messages.
        prompts: of the job, or its preference pairs.
    """

    def keys(epoch: int) -> NDArray[np.float64]:
        try:
            values = np.asarray(function(list(prompts), epoch), np.float64)
        except NightshiftError:
            raise
        except Exception as error:  # whatever the user's function raises, or returns
            raise NightshiftError(
                f"data.curriculum {name!r} raised {type(error).__name__}: {error}", role="job"
            ) from error
        if values.shape != (len(prompts),) or not np.isfinite(values).all():
            raise BadInputError(
                f"data.curriculum {name!r} returned shape {values.shape} for {len(prompts)} prompts, or a value that "
                "is not finite",
                role="job",
                fix="Return one finite number per prompt; prompts with lower ones come first",
            )
        return values

    return keys
