"""What libraries raise, as one sentence with its likely cause and what to do. Pure: texts in, sentences out.

Each role translates at its root, where rank or sample is known (:func:`translate`); the traceback stays in its log.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from nightshift.wire.errors import NightshiftError, RoleError, RoleTimeoutError

#: Errors of a chain that are looked at.
_DEPTH = 8
_SHOWN = 300


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What an error text means.

    Attributes:
        kind: name of the rule that knew it.
        what: the end of a sentence that begins with who failed: "ran out of memory on GPU 0".
        fix: what to do; may depend on the role.
        timeout: whether something was waited for.
    """

    kind: str
    what: str
    fix: str
    timeout: bool = False


@dataclass(frozen=True, slots=True)
class Rule:
    """One kind of failure: how its text looks, what it says, and the fix by role ("" for any other one)."""

    kind: str
    pattern: re.Pattern[str]
    what: Callable[[re.Match[str]], str]
    fixes: Mapping[str, str]
    timeout: bool = False


_LESS_MEMORY = {
    "trainer": "Lower trainer.micro_batch_size, or set trainer.gradient_checkpointing",
    "rollout": "Lower rollout.kv_cache_gib or rollout.max_num_seqs",
    "reference": "Lower scorers.reference.micro_batch_size",
    "critic": "Lower trainer.micro_batch_size",
    "reward": "Lower rewards[].workers, or what the reward function holds",
    "": "Free memory on this machine",
}
_OTHER_RANKS = {
    "": "Look for the rank whose log ends first: it died, or does something else; for a slow one raise "
    "trainer.update_timeout_s"
}
_SAME_MODEL = {
    "": "Check that the role has the model and tokenizer that the job names; logs hold where it happened",
    "rollout": "The server must run the job's model: same architecture, vocabulary and tied head",
}
_ONE_DTYPE = {
    "": "Use one precision for all that meet: rollout.dtype, trainer.dtype or the model's own",
}


def _rule(
    kind: str,
    pattern: str,
    what: str | Callable[[re.Match[str]], str],
    fixes: Mapping[str, str] | str,
    *,
    timeout: bool = False,
) -> Rule:
    say = what if callable(what) else lambda match, text=what: match.expand(text)
    by_role = {"": fixes} if isinstance(fixes, str) else fixes
    return Rule(kind, re.compile(pattern, re.DOTALL | re.IGNORECASE), say, by_role, timeout)


def _gpu_memory(match: re.Match[str]) -> str:
    where = f" on GPU {match['gpu']}" if match["gpu"] else ""
    asked = f": {match['asked']} more were asked for" if match["asked"] else ""
    free = f", {match['free']} of {match['total']} were free" if match["free"] else ""
    return f"ran out of memory{where}{asked}{free}"


def _collective(match: re.Match[str]) -> str:
    return f"waited {int(match['ms']) / 1000:g} s for the other ranks in {match['op']} (NCCL)"


#: In this order: the first that fits is taken, so that causes come before what they lead to.
RULES: tuple[Rule, ...] = (
    _rule(
        "gpu_memory",
        r"(?:CUDA out of memory|CUDA error: out of memory|OutOfMemoryError: CUDA)"
        r"(?:[^\n]*?Tried to allocate (?P<asked>[\d.]+ \wiB))?(?:[^\n]*?GPU (?P<gpu>\d+))?"
        r"(?:[^\n]*?total capacity of (?P<total>[\d.]+ \wiB) of which (?P<free>[\d.]+ \wiB) is free)?",
        _gpu_memory,
        _LESS_MEMORY,
    ),
    _rule(
        "memory_monitor",
        r"(?:killed due to the node running low on memory|ray\.exceptions\.OutOfMemoryError)",
        "was ended by Ray because the node ran low on memory",
        _LESS_MEMORY,
    ),
    _rule(
        "memory",
        r"can't allocate memory|Cannot allocate memory|^MemoryError|std::bad_alloc|DefaultCPUAllocator: not enough "
        r"memory",
        "ran out of memory",
        _LESS_MEMORY,
    ),
    _rule(
        "nccl_timeout",
        r"Watchdog caught collective operation timeout.*?OpType=(?P<op>\w+).*?Timeout\(ms\)=(?P<ms>\d+)",
        _collective,
        _OTHER_RANKS,
        timeout=True,
    ),
    _rule(
        "gloo_timeout",
        r"Timed out waiting (?P<ms>\d+)ms for (?P<op>\w+) operation to complete",
        lambda match: f"waited {int(match['ms']) / 1000:g} s for another rank to {match['op']} (gloo)",
        _OTHER_RANKS,
        timeout=True,
    ),
    _rule(
        "rendezvous",
        r"(?:DistStoreError: )?Timed out after (?P<s>\d+) seconds? waiting for clients\. (?P<n>\d+/\d+) clients joined",
        r"waited \g<s> s for all ranks to join, \g<n> did",
        "Look for the rank that did not start, or free the machine",
        timeout=True,
    ),
    _rule(
        "gloo_closed",
        r"gloo[^\n]*?(?:Connection closed by peer|Connection reset by peer|Broken pipe)(?: \[(?P<peer>[^\]]+)\])?",
        lambda match: (
            "lost another rank" + (f" ({match['peer']})" if match["peer"] else "") + " in a collective (gloo)"
        ),
        _OTHER_RANKS,
    ),
    _rule(
        "nccl",
        r"NCCL error[^\n]*?(?P<why>unhandled system error|unhandled cuda error|remote process exited|invalid usage|"
        r"internal error)|(?P<code>nccl(?:SystemError|RemoteError|InternalError|UnhandledCudaError|InvalidUsage))",
        lambda match: f"had an NCCL failure: {match['why'] or match['code']}",
        {
            "": "Another rank's log usually holds the cause; else set NCCL_DEBUG=INFO and look at the network "
            "between them"
        },
    ),
    _rule(
        "actor_died",
        r"(?:The actor (?:is dead|died)|ActorDiedError|worker process has died).*?"
        r"(?:class_name: (?P<name>\w+).*?)?(?:Worker exit type: (?P<type>\w+))",
        lambda match: f"lost its Ray actor{' ' + match['name'] if match['name'] else ''} ({match['type']})",
        {
            "": "logs/ray/worker-*.err holds its last words; SYSTEM_ERROR without any is often the kernel's memory "
            "killer"
        },
    ),
    _rule(
        "actor_died_plainly",
        r"The actor (?:is dead|died)[^\n]*|ActorDiedError|RayActorError",
        "lost its Ray actor",
        "logs/ray/worker-*.err holds its last words",
    ),
    _rule(
        "device",
        r"Expected all tensors to be on the same device, but (?:found at least two devices, (?P<a>[\w:]+) and "
        r"(?P<b>[\w:]+)|got [^\n]*?(?P<c>cuda:\d+|cpu)[^\n]*?(?P<d>cuda:\d+|cpu))",
        lambda match: f"got tensors on two devices, {match['a'] or match['c']} and {match['b'] or match['d']}",
        "Move what is yours (a custom advantage or loss) to the model's device",
    ),
    _rule(
        "dtype",
        r"expected scalar type (?P<a>\w+) but found (?P<b>\w+)",
        r"got \g<b> values where \g<a> ones are needed",
        _ONE_DTYPE,
    ),
    _rule(
        "dtype",
        r"must have the same dtype, but got:? (?P<a>[\w:]+) (?:and|!=) (?P<b>[\w:]+)",
        lambda match: f"multiplied {match['a']} with {match['b'].removeprefix('c10::')}",
        _ONE_DTYPE,
    ),
    _rule(
        "dtype",
        r"expected m1 and m2 to have the same dtype, but got: (?P<a>[\w:]+) != (?P<b>[\w:]+)",
        lambda match: f"multiplied {match['a']} with {match['b'].removeprefix('c10::')}",
        _ONE_DTYPE,
    ),
    _rule(
        "weights",
        r"size mismatch for (?P<name>[\w.]+): copying a param with shape torch\.Size\((?P<a>\[[^\]]*\])\) from "
        r"checkpoint, "
        r"the shape in current model is torch\.Size\((?P<b>\[[^\]]*\])\)",
        r"was given weights of another model: \g<name> is \g<a>, the model has \g<b>",
        _SAME_MODEL,
    ),
    _rule(
        "shape",
        r"The size of tensor a \((?P<a>\d+)\) must match the size of tensor b \((?P<b>\d+)\) at non-singleton "
        r"dimension "
        r"(?P<dim>\d+)",
        r"combined tensors of \g<a> and \g<b> entries in dimension \g<dim>",
        _SAME_MODEL,
    ),
    _rule(
        "shape",
        r"mat1 and mat2 shapes cannot be multiplied \((?P<a>\d+x\d+) and (?P<b>\d+x\d+)\)",
        r"multiplied matrices of \g<a> and \g<b>",
        _SAME_MODEL,
    ),
    _rule(
        "shape",
        r"shape '(?P<a>\[[^\]]*\])' is invalid for input of size (?P<n>\d+)",
        r"could not bring \g<n> values into the shape \g<a>",
        _SAME_MODEL,
    ),
    _rule(
        "token_id",
        r"index out of range in self|device-side assert triggered|Assertion `srcIndex < srcSelectDimSize` failed",
        "looked up a token id that its model does not have",
        {"": "Tokenizer and model differ: check model.path and model.tokenizer"},
    ),
    _rule(
        "gpu_fault",
        r"CUDA error: (?P<why>an illegal memory access was encountered|unspecified launch failure|misaligned address|"
        r"uncorrectable ECC error encountered)",
        r"had a fault of its GPU: \g<why>",
        "Start the role again; where it comes back, run with CUDA_LAUNCH_BLOCKING=1 to find the kernel",
    ),
    _rule(
        "disk_full",
        r"No space left on device|\[Errno 28\]|Disk quota exceeded",
        "found no room on the disk",
        "Set checkpoint.keep, move old runs away, or enlarge the volume (or /dev/shm for weights)",
    ),
    _rule(
        "open_files",
        r"Too many open files|\[Errno 24\]",
        "may open no more files or connections",
        "Raise the limit (ulimit -n)",
    ),
    _rule(
        "http_refused",
        r"(?:ConnectError|ConnectionRefusedError|All connection attempts failed|Connection refused)",
        "found nobody at the address that it called",
        "Check that the service runs and that its URL and port are right",
    ),
    _rule(
        "http_timeout",
        r"(?:ReadTimeout|ConnectTimeout|PoolTimeout|httpx\.TimeoutException)",
        "had no answer in time over HTTP",
        {
            "": "Look at the load and the log of what it called",
            "rollout": "Raise rollout.request_timeout_s, or look at the server",
        },
        timeout=True,
    ),
    _rule(
        "http_closed",
        r"(?:RemoteProtocolError|Server disconnected|ConnectionResetError|Connection reset by peer|ReadError)",
        "lost its HTTP connection in the middle of an answer",
        "The service behind it was restarted or died: see its log",
    ),
    _rule(
        "http_status",
        r"'?(?P<code>401|403) (?:Unauthorized|Forbidden)'?(?: for url '(?P<url>[^']+)')?",
        lambda match: f"was refused with HTTP {match['code']}" + (f" by {match['url']}" if match["url"] else ""),
        "Give it the token that the service expects",
    ),
    _rule(
        "http_status",
        r"'?(?P<code>4\d\d|5\d\d) (?P<reason>[A-Z][A-Za-z -]+?)'? for url '(?P<url>[^']+)'",
        r"was answered HTTP \g<code> (\g<reason>) by \g<url>",
        "The log of that service says why",
    ),
    _rule(
        "module",
        r"No module named '?(?P<name>[\w.]+)'?",
        r"lacks the Python module \g<name>",
        "Install the locks of requirements/ where this role runs",
    ),
)


def diagnose(text: str, role: str = "") -> Diagnosis | None:
    """What an error text means; None where no rule knows it.

    Args:
        text: message or end of a log, with the type's name in front where there is one.
        role: whose failure it is, for the fix.
    """
    for rule in RULES:
        if match := rule.pattern.search(text):
            fix = rule.fixes.get(role, rule.fixes.get("", ""))
            return Diagnosis(rule.kind, rule.what(match)[:_SHOWN], fix, rule.timeout)
    return None


def explain(error: BaseException, role: str = "") -> str:
    """An error as the rest of a sentence: what a rule says of it, else its type and text."""
    found = diagnose(f"{type(error).__name__}: {error}", role)
    return f"it {found.what}" if found else f"{type(error).__name__}: {error}"


def translate(error: BaseException, *, role: str, subject: str = "") -> NightshiftError:
    """An error of any kind as one of ours. Errors that are ours already, also within a chain, stay as they are.

    Args:
        role: whose failure it is.
        subject: which part of it: "rank 3", "sample g0000012.1"; empty: the role itself.
    """
    chain = list(_chain(error))
    for one in chain:
        if isinstance(one, NightshiftError):
            return one
    who = subject or f"the {role}"
    for one in reversed(chain):  # what was raised first is the root
        if found := diagnose(f"{type(one).__name__}: {one}", role):
            kind = RoleTimeoutError if found.timeout else RoleError
            return kind(f"{who} {found.what}", role=role, fix=found.fix)
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = f"{type(error).__name__}: {lines[0][:_SHOWN]}" if lines else type(error).__name__
    return RoleError(f"{subject}: {said}" if subject else said, role=role)


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error, then what it was raised from, outermost first; a Ray task's own error counts as its cause."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen and len(seen) < _DEPTH:
        seen.add(id(current))
        yield current
        inner = getattr(current, "cause", None)
        current = inner if isinstance(inner, BaseException) else current.__cause__ or current.__context__
