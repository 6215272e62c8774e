"""The config tree converted to the plain settings of each part, so that none knows the tree."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

import xxhash

from extproc.adapters.discovery import DiscoverySettings, Listed
from extproc.config import load_members
from extproc.config.sections import split_address
from extproc.core.intake import IntakeSettings
from extproc.core.phases import BodyMode, Observe, StreamSettings
from extproc.core.policies import Tuning
from extproc.core.router import RouterSettings
from extproc.core.session import SessionRules

if TYPE_CHECKING:
    from collections.abc import Iterable

    from extproc.config.sections import Config, Intake, Member

_BYTES_PER_TOKEN = 4


def router_settings(config: Config) -> RouterSettings:
    """Convert the routing section to the core's settings."""
    given = config.routing.model_dump()
    names = {field.name for field in fields(Tuning)}
    tuning = Tuning(**{name: given.pop(name) for name in names & given.keys()})
    block_tokens = config.intake.block_bytes // _BYTES_PER_TOKEN
    return RouterSettings(tuning=tuning, block_tokens=block_tokens, **given)


def intake_settings(intake: Intake) -> IntakeSettings:
    """Convert the intake section to the core's settings."""
    given = {
        "headers": intake.session_headers,
        "fields": intake.session_fields,
    }
    return IntakeSettings(
        block_bytes=intake.block_bytes,
        max_prompt_tokens=intake.max_prompt_tokens,
        seed=xxhash.xxh3_64_intdigest(intake.secret.encode()),
        session=SessionRules(**{name: rule for name, rule in given.items() if rule is not None}),
        tier1_header=intake.tier1_header,
        default_model=intake.default_model,
        refuse_unreadable=intake.refuse_unreadable,
    )


def stream_settings(config: Config) -> StreamSettings:
    """Convert the stream section to the core's settings."""
    return StreamSettings(
        body_mode=BodyMode(config.stream.body_mode),
        max_body_bytes=config.stream.max_body_bytes,
        observe=Observe(config.stream.observe),
    )


def discovery_settings(config: Config) -> DiscoverySettings:
    """Convert the endpoints section to discovery's settings."""
    endpoints = config.endpoints
    return DiscoverySettings(
        listed=_listed(endpoints.static),
        file=Path(endpoints.file) if endpoints.file else None,
        read_file=lambda file: _listed(load_members(file)),
        poll_s=endpoints.poll_s,
        resolve_s=endpoints.resolve_s,
    )


def _listed(members: Iterable[Member]) -> tuple[Listed, ...]:
    listed = []
    for member in members:
        host, port = split_address(member.address)
        given = member.model_dump(exclude={"address"})
        listed.append(Listed(host=host, port=port, **given))
    return tuple(listed)
