"""From the bytes of a request to what a policy asks about it: chains, keys, length."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from extproc.core.blocks import canonical, hash_chain, key_hash, seed_from
from extproc.core.decision import Chain, KeyHash, RoutingRequest
from extproc.core.errors import UnreadableBodyError
from extproc.core.prompt import Prompt, extract_prompt
from extproc.core.session import ClientSession, SessionRules, client_session, usable_id

if TYPE_CHECKING:
    from collections.abc import Mapping

# English text, code and JSON average about 4 bytes a token in current vocabularies.
BYTES_PER_TOKEN = 4
# Conversations of coding agents begin with the same injected files, so the first user turn
# counts as far as this; a bare text has no turns, its first part must do.
_OPENING_BYTES = 32 * 1024
_TEXT_OPENING_BYTES = 2 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class IntakeSettings:
    """How bodies become blocks and keys.

    `seed` keys all hashes (`blocks.seed_from` makes it of a secret). `tier1_header` and
    `tier1_field` name a header or body field whose text is the tier-1 key when sent.
    `default_model` is the namespace's model where the body does not tell.
    """

    block_bytes: int = 512
    max_prompt_tokens: int = 131_072
    seed: int = seed_from("extproc")
    session: SessionRules = field(default_factory=SessionRules)
    tier1_header: str | None = None
    tier1_field: str | None = None
    default_model: str = ""
    refuse_unreadable: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """All that a readable request is known by. Lengths in bytes are of canonical text."""

    prompt: Prompt
    model: str
    session: ClientSession | None
    namespace: KeyHash
    tier1: KeyHash
    tier2: KeyHash
    chains: tuple[Chain, ...]
    instruction_bytes: int
    prompt_bytes: int


def read_request(
    path: str,
    headers: Mapping[str, str],
    body: bytes,
    *,
    complete: bool,
    subset: frozenset[str] | None,
    settings: IntakeSettings,
) -> RoutingRequest:
    """Read a request whose header names are lower case; `complete`: the body is all there.

    A body that is no prompt gives a request with `readable` False. Raises
    UnreadableBodyError for it where the settings say so; never for an empty body.
    """
    identity = identify(path, headers, body, complete=complete, settings=settings)
    if identity is None:
        if settings.refuse_unreadable and body:
            message = "the body is not a prompt of a known API"
            raise UnreadableBodyError(message)
        return _unreadable(headers, body, subset, settings)
    prompt_bytes = identity.prompt_bytes
    if not complete:
        prompt_bytes = prompt_bytes * _full_bytes(headers, body) // max(1, len(body))
    return RoutingRequest(
        chains=identity.chains,
        prompt_tokens=-(-prompt_bytes // BYTES_PER_TOKEN),
        block_tokens=settings.block_bytes // BYTES_PER_TOKEN,
        namespace=identity.namespace,
        tier1=identity.tier1,
        tier1_tokens=identity.instruction_bytes // BYTES_PER_TOKEN,
        tier2=identity.tier2,
        session=identity.session is not None,
        # A body cut before all of its prompt tells nothing to choose by.
        readable=bool(identity.prompt_bytes or identity.session),
        model=identity.model,
        subset=subset,
    )


def identify(
    path: str,
    headers: Mapping[str, str],
    body: bytes,
    *,
    complete: bool,
    settings: IntakeSettings,
) -> Identity | None:
    """Find out what a request is known by; None when its body is no prompt."""
    fields = settings.session.fields + ((settings.tier1_field,) if settings.tier1_field else ())
    prompt = extract_prompt(path, body, complete=complete, fields=fields) if body else None
    if prompt is None:
        return None
    model = prompt.model or settings.default_model
    namespace = _namespace(settings, model, prompt.adapter, prompt.salt)
    head = canonical(prompt.head[: prompt.instructions])
    texts = [canonical(sequence) for sequence in prompt.sequences]
    tier1 = _tier1(headers, prompt, head, namespace, settings)
    session = client_session(headers, prompt, settings.session)
    chains = tuple(
        hash_chain(
            text,
            block_bytes=settings.block_bytes,
            max_blocks=settings.max_prompt_tokens * BYTES_PER_TOKEN // settings.block_bytes,
            seed=namespace,
        )
        for text in texts
    )
    return Identity(
        prompt=prompt,
        model=model,
        session=session,
        namespace=namespace,
        tier1=tier1,
        tier2=_session_key(namespace, session) if session else _fingerprint(prompt, texts, tier1),
        chains=chains,
        instruction_bytes=len(head),
        prompt_bytes=sum(len(text) for text in texts) + prompt.behind_bytes,
    )


def _namespace(settings: IntakeSettings, model: str, adapter: str, salt: str) -> KeyHash:
    parts = (part.encode("utf-8", "surrogatepass") for part in (model, adapter, salt))
    return key_hash(settings.seed, *parts)


def _tier1(
    headers: Mapping[str, str],
    prompt: Prompt,
    head: bytes,
    namespace: KeyHash,
    settings: IntakeSettings,
) -> KeyHash:
    """Key what many sessions share: the task the client names, else tools and system."""
    task = usable_id(headers.get(settings.tier1_header or "", ""))
    task = task or usable_id(prompt.fields.get(settings.tier1_field or "", ""))
    if task:
        return key_hash(namespace, b"task", task.encode())
    return key_hash(namespace, b"instructions", head)


def _session_key(namespace: KeyHash, session: ClientSession) -> KeyHash:
    return key_hash(namespace, b"session", session.value.encode("utf-8", "surrogatepass"))


def _fingerprint(prompt: Prompt, texts: list[bytes], tier1: KeyHash) -> KeyHash:
    """Key a conversation by how it opens, narrowed by who speaks."""
    if prompt.conversational:
        opening = canonical(prompt.head[prompt.instructions :])[:_OPENING_BYTES]
    else:
        opening = b"".join(texts[:1])[:_TEXT_OPENING_BYTES]
    return key_hash(tier1, prompt.person.encode("utf-8", "surrogatepass"), opening)


def _full_bytes(headers: Mapping[str, str], body: bytes) -> int:
    """Give the length of the whole body, as far as it is known."""
    declared = headers.get("content-length", "")
    known = declared.isascii() and declared.isdigit() and len(declared) < len("1000000000000")
    return max(len(body), int(declared) if known else 0)


def _unreadable(
    headers: Mapping[str, str],
    body: bytes,
    subset: frozenset[str] | None,
    settings: IntakeSettings,
) -> RoutingRequest:
    namespace = _namespace(settings, settings.default_model, "", "")
    session = client_session(headers, None, settings.session)
    return RoutingRequest(
        prompt_tokens=_full_bytes(headers, body) // BYTES_PER_TOKEN,
        block_tokens=settings.block_bytes // BYTES_PER_TOKEN,
        namespace=namespace,
        tier2=_session_key(namespace, session) if session else KeyHash(0),
        session=session is not None,
        readable=False,
        model=settings.default_model,
        subset=subset,
    )
