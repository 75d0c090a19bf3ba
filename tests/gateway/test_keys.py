"""What is written about keys in a file, and what they then may use."""

from __future__ import annotations

from pathlib import Path

import pytest

from lilliput.errors import BadRequest
from lilliput.gateway.account import Account, Limits
from lilliput.gateway.keys import Key, Keys, read_keys
from lilliput.gateway.problems import Problem


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "keys"
    file.touch(mode=0o600)
    return file


def test_a_file_of_keys(file: Path) -> None:
    file.write_text("# who may\n\nann  sk-1 requests=2 tokens-per-minute=100\n  bob sk-2==\n")
    ann, bob = read_keys(file)
    assert ann == Key("ann", "sk-1", Limits(requests=2, tokens_per_minute=100))
    assert bob == Key("bob", "sk-2==", Limits())
    assert "sk-" not in repr([ann, bob])
    assert Keys([ann, bob]).account("bearer sk-2==").name == "bob"
    for wrong in ("", "sk-1", "Bearer sk-3", "Basic sk-1", "Bearer sk-2"):
        with pytest.raises(Problem, match="API key"):
            Keys([ann, bob]).account(wrong)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("bob", "line 3: there is no key"),
        ("bob requests=2 sk-2", "line 3: there is no key"),
        ("bob sk-2 sk-3=x", "line 3: what follows the key is no limit"),
        ("bob sk-2 requests=0", "line 3: requests must be a whole number from 1 on"),
        ("bob sk-2 requests-per-minute=2.5", "line 3: requests-per-minute must be a whole number"),
        ("bob sk-2 requests=2 requests=3", "line 3: requests is there twice"),
        ("bob sk-1", "line 3: the keys of 'ann' and 'bob' are the same"),
        ("ann sk-2", "line 3: two keys have the name 'ann'"),
        ("bob sk-\u00fc", "line 3: a key has other signs than ASCII's"),
    ],
)
def test_a_bad_line_is_named_and_no_key_is_shown(file: Path, line: str, says: str) -> None:
    file.write_text(f"ann sk-1\n\n{line}\n")
    with pytest.raises(BadRequest) as error:
        read_keys(file)
    assert says in str(error.value)
    assert "sk-" not in str(error.value)


def test_a_file_that_is_none(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(BadRequest, match="there is no key in"):
        read_keys(file)
    with pytest.raises(BadRequest, match="cannot read"):
        read_keys(file.with_name("other"))
    file.write_bytes(b"\xff")
    with pytest.raises(BadRequest, match="no text"):
        read_keys(file)
    with pytest.raises(BadRequest, match="no file of keys"):
        read_keys("/dev/zero")
    file.write_text("ann sk-1")
    file.chmod(0o644)
    read_keys(file)
    assert f"chmod 600 {file}" in caplog.text


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def refused(account: Account) -> dict[str, str]:
    """The headers of a refusal."""
    with pytest.raises(Problem) as problem, account.request():
        pass
    assert (problem.value.status, problem.value.code) == (429, "rate_limit_exceeded")
    return problem.value.headers


def test_requests_at_a_time() -> None:
    account = Account("ann", Limits(requests=2))
    with account.request():
        with account.request():
            assert refused(account) == {"Retry-After": "1"}
        with account.request():
            pass
    assert (account.running, account.requests, account.refused) == (0, 3, 1)


def test_requests_a_minute_come_back_evenly() -> None:
    clock = Clock()
    account = Account("ann", Limits(requests_per_minute=3), clock=clock)
    for _ in range(3):
        with account.request():
            pass
    assert refused(account) == {
        "Retry-After": "20",
        "x-ratelimit-limit-requests": "3",
        "x-ratelimit-remaining-requests": "0",
        "x-ratelimit-reset-requests": "1m0s",
    }
    clock.now += 19
    assert refused(account)["Retry-After"] == "1"
    clock.now += 1
    with account.request():
        pass
    clock.now += 3600  # what is not used is not saved for longer than a minute
    assert account.headers()["x-ratelimit-remaining-requests"] == "3"
    assert account.headers()["x-ratelimit-reset-requests"] == "0s"


def test_tokens_a_minute() -> None:
    clock = Clock()
    account = Account("ann", Limits(tokens_per_minute=60), clock=clock)
    with account.request():
        account.use_prompt(50)
        for _ in range(40):  # an answer is not cut
            account.use_answer(1)
    assert refused(account)["Retry-After"] == "31"
    assert account.headers()["x-ratelimit-reset-tokens"] == "1m30s"
    clock.now += 31
    with account.request(), pytest.raises(Problem) as problem:
        account.use_prompt(5)
    assert problem.value.headers["Retry-After"] == "4"
    with account.request(), pytest.raises(Problem, match="this prompt has 61") as problem:
        account.use_prompt(61)
    assert "Retry-After" not in problem.value.headers
    with account.request():
        account.use_prompt(1)
    assert (account.prompt_tokens, account.answer_tokens, account.refused) == (51, 40, 3)


def test_who_has_no_limits_is_told_none() -> None:
    account = Account("ann")
    with account.request():
        account.use_prompt(10**9)
    assert account.headers() == {}
