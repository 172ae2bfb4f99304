"""Who may call the services of a run."""

from __future__ import annotations

import pytest

from nightshift.wire import listen
from nightshift.wire.errors import BadInputError


def test_on_a_machine_of_its_own_a_run_listens_on_loopback_and_asks_for_nothing() -> None:
    assert listen.listen_on({}) == "127.0.0.1"
    assert listen.reached_as({}) == "127.0.0.1"
    assert listen.allowed((), {})
    assert listen.metadata("") == ()


def test_for_another_host_it_listens_everywhere_and_asks_for_the_token() -> None:
    environment = {listen.HOST_VARIABLE: "trainer-0.night", listen.TOKEN_VARIABLE: "secret"}
    assert listen.listen_on(environment) == "0.0.0.0"
    assert listen.reached_as(environment) == "trainer-0.night"
    assert listen.allowed([("application", "x"), *listen.metadata("secret")], environment)
    assert listen.allowed([("Authorization", b"Bearer secret")], environment)


def test_without_a_token_it_does_not_listen_where_others_can_reach_it() -> None:
    with pytest.raises(BadInputError, match=listen.TOKEN_VARIABLE):
        listen.listen_on({listen.HOST_VARIABLE: "trainer-0.night"})


@pytest.mark.parametrize(
    "pairs",
    [
        None,
        [],
        [("authorization", "Bearer other")],
        [("authorization", "secret")],
        [("authorization", "Bearer secret"), ("authorization", "Bearer other")],
    ],
)
def test_a_call_without_the_token_is_refused(pairs: list[tuple[str, str]] | None) -> None:
    assert not listen.allowed(pairs, {listen.TOKEN_VARIABLE: "secret"})
