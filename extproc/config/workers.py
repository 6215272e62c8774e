"""One config for several worker processes on a host, and what each makes of it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from extproc.config import ConfigError
from extproc.config.addresses import check_listen_address, split_address
from extproc.config.sections import WORKERS_NEED_LOG

if TYPE_CHECKING:
    from extproc.config.sections import Config, Section

_UNIX = "unix:"


def with_workers(config: Config, count: int | None) -> Config:
    """Give the config with another number of workers; None: unchanged. Raise ConfigError."""
    if count is None:
        return config
    if count > 1 and config.decision_log is None:
        raise ConfigError([f"--workers {count}: {WORKERS_NEED_LOG}"])
    listen = config.listen.model_copy(update={"workers": count})
    return config.model_copy(update={"listen": listen})


def worker_addresses(config: Config) -> tuple[str, ...]:
    """Where each worker listens: counted up from `listen.address`. Raise ConfigError."""
    workers = range(config.listen.workers)
    return tuple(_count_up(config.listen.address, "listen.address", n) for n in workers)


def worker_configs(config: Config) -> tuple[Config, ...]:
    """Give each worker a config of its own: addresses, name and record. Raise ConfigError."""
    return tuple(
        _worker_config(config, number, address)
        for number, address in enumerate(worker_addresses(config))
    )


def _worker_config(config: Config, number: int, address: str) -> Config:
    if config.listen.workers == 1:
        return config
    listen, metrics, record = config.listen, config.metrics, config.record
    named = {"address": address, "router_id": f"{listen.router_id}-{number}", "workers": 1}
    update: dict[str, Section] = {"listen": listen.model_copy(update=named)}
    if metrics.address is not None:
        admin = _count_up(metrics.address, "metrics.address", number)
        update["metrics"] = metrics.model_copy(update={"address": admin})
    if record.file is not None and number:
        file = Path(record.file)
        own = str(file.with_name(f"{file.stem}-{number}{file.suffix}"))
        update["record"] = record.model_copy(update={"file": own})
    return config.model_copy(update=update)


def _count_up(address: str, key: str, number: int) -> str:
    """Add to the port, or to the name of the socket; port 0 stays, it asks for a free one."""
    if number == 0:
        return address
    if address.startswith(_UNIX):
        counted = f"{address}.{number}"
    else:
        host, port = split_address(address, ephemeral=True)
        shown = f"[{host}]" if ":" in host else host
        counted = f"{shown}:{port + number if port else 0}"
    try:
        return check_listen_address(counted)
    except ValueError as error:
        raise ConfigError([f"{key} of worker {number}: {error}"]) from None
