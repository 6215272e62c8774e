"""The config tree converted to the plain settings of each part, so that none knows the tree."""

from __future__ import annotations

import os
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

from extproc.adapters.discovery import DiscoverySettings, Listed
from extproc.adapters.envoy_settings import GatewaySettings
from extproc.adapters.log_settings import LogSettings
from extproc.config import load_members
from extproc.config.addresses import split_address
from extproc.config.workers import worker_addresses
from extproc.core.blocks import key_hash, seed_from
from extproc.core.intake import BYTES_PER_TOKEN, IntakeSettings
from extproc.core.phases import BodyMode, Observe, StreamSettings
from extproc.core.policies import Tuning
from extproc.core.router import RouterSettings
from extproc.core.session import SessionRules

if TYPE_CHECKING:
    from collections.abc import Iterable

    from extproc.config.sections import Config, DecisionLog, Intake, Member


def router_settings(config: Config) -> RouterSettings:
    """Convert the routing section to the core's settings."""
    given = config.routing.model_dump()
    names = {field.name for field in fields(Tuning)}
    tuning = Tuning(**{name: given.pop(name) for name in names & given.keys()})
    block_tokens = config.intake.block_bytes // BYTES_PER_TOKEN
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
        seed=seed_from(intake.secret),
        session=SessionRules(**{name: rule for name, rule in given.items() if rule is not None}),
        tier1_header=intake.tier1_header,
        tier1_field=intake.tier1_field,
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


def log_settings(log: DecisionLog, intake: Intake) -> LogSettings:
    """Convert the log's section; who hashes otherwise than we do has another stream."""
    layout = key_hash(seed_from(intake.secret), str(intake.block_bytes).encode())

    def read_password() -> str | None:
        if log.password_file is not None:
            return Path(log.password_file).read_text(encoding="utf-8").strip()
        return os.environ.get(log.password_env) if log.password_env else None

    return LogSettings(
        url=log.url,
        stream=f"{log.prefix}:{log.pool}:{layout:016x}",
        username=log.username,
        read_password=read_password,
        ca_file=Path(log.ca_file) if log.ca_file else None,
    )


def gateway_settings(config: Config, endpoints: Iterable[str]) -> GatewaySettings:
    """Convert what concerns Envoy; `endpoints` are `host:port`, of addresses or of names."""
    gateway, health = config.gateway, config.health
    listen_host, listen_port = split_address(gateway.listen, ephemeral=True)
    admin = split_address(gateway.admin, ephemeral=True) if gateway.admin else None
    rules = intake_settings(config.intake)
    task_header = (rules.tier1_header,) if rules.tier1_header else ()
    return GatewaySettings(
        listen_host=listen_host,
        listen_port=listen_port,
        admin_host=admin[0] if admin else listen_host,
        admin_port=admin[1] if admin else None,
        endpoints=tuple(endpoints),
        routers=gateway.routers or worker_addresses(config),
        body_mode=BodyMode(config.stream.body_mode),
        observe=Observe(config.stream.observe),
        max_body_bytes=config.stream.max_body_bytes,
        health_path=health.path if health.enabled else None,
        health_interval_s=health.interval_s,
        health_timeout_s=health.timeout_s,
        forward_headers=rules.session.headers + task_header,
        **gateway.model_dump(exclude={"listen", "admin", "routers"}),
    )


def _listed(members: Iterable[Member]) -> tuple[Listed, ...]:
    listed = []
    for member in members:
        host, port = split_address(member.address)
        given = member.model_dump(exclude={"address"})
        listed.append(Listed(host=host, port=port, **given))
    return tuple(listed)
