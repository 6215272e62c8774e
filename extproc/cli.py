"""The command line. An error is one line on stderr and exit code 2, never a traceback.

Commands import what they need when they run: `check` must not wait for Envoy's types.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from rich.console import Console

from extproc.config import load_config
from extproc.config.sections import MAX_WORKERS, Config, Routing
from extproc.core.errors import ExtprocError
from extproc.running import run_loop, set_up_logging

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from extproc.core.decision import Decision
    from extproc.core.endpoint import Endpoint

_UNHEALTHY, _ERROR, _INTERRUPTED = 1, 2, 130
_POLICIES: tuple[str, ...] = get_args(Routing.model_fields["policy"].annotation)
_MAX_PORT = 65_535


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; give the exit code: 0 done, 2 an error told on stderr, 130 interrupted."""
    # Envoy is started from a process in which gRPC runs; its fork handlers only complain.
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    parser = _parser()
    options, rest = parser.parse_known_args(arguments)
    if rest and not options.takes_rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    options.rest = rest
    try:
        code: int | None = options.run(options)
        sys.stdout.flush()
    except (ExtprocError, OSError) as error:
        if isinstance(error, BrokenPipeError):
            # Whoever read the output has enough; Python must not complain at its exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0
        print(f"extproc: {error}", file=sys.stderr)
        return _ERROR
    except KeyboardInterrupt:
        return _INTERRUPTED
    return code or 0


def _serve(options: argparse.Namespace) -> None:
    from extproc.config.workers import with_workers, worker_configs  # noqa: PLC0415

    configs = worker_configs(with_workers(_load(options), options.workers))
    set_up_logging(configs[0].logging.level)
    if len(configs) > 1:
        from extproc.workers import serve_workers  # noqa: PLC0415

        run_loop(serve_workers(configs))
    else:
        from extproc.adapters.allocator import keep_freed_memory  # noqa: PLC0415
        from extproc.app import serve  # noqa: PLC0415

        keep_freed_memory()
        run_loop(serve(configs[0]))


def _check(options: argparse.Namespace) -> None:
    from extproc.config.workers import worker_addresses  # noqa: PLC0415

    config = load_config(options.file)
    source = config.endpoints.file or f"{len(config.endpoints.static)} listed"
    print(f"{options.file}: ok")
    print(f"  listen     {', '.join(worker_addresses(config))}")
    print(f"  endpoints  {source}, health checks {'on' if config.health.enabled else 'off'}")
    print(f"  policy     {config.routing.policy}")
    print(f"  metrics    {config.metrics.address or 'off'}")
    if not config.endpoints.file and not config.endpoints.static:
        print("  note       no endpoints: every request will be answered with 503")


def _explain(options: argparse.Namespace) -> None:
    from extproc.explain import explain, print_explanation, read_sample  # noqa: PLC0415

    config = load_config(options.config) if options.config else Config()
    sample = read_sample(options.request, options.path)
    explanation = explain(sample, config, _resolve_endpoints(config))
    print_explanation(explanation, Console(highlight=False))


def _envoy_config(options: argparse.Namespace) -> None:
    from extproc.adapters.envoy_config import bootstrap, filter_snippet, to_yaml  # noqa: PLC0415
    from extproc.settings import gateway_settings  # noqa: PLC0415

    config = _load(options)
    names = [member.address for member in config.endpoints.static]
    settings = gateway_settings(config, names if options.names else _resolve_endpoints(config))
    as_snippet = options.snippet or options.format == "snippet"
    command = "extproc envoy-config"
    command += f" --config {options.config}" if options.config else ""
    command += f" --endpoints {options.endpoints}" if options.endpoints else ""
    command += " --names" if options.names else ""
    command += " --snippet" if as_snippet else ""
    text = f"# Made by `{command}`; change the settings, not this file.\n"
    text += filter_snippet(settings) if as_snippet else to_yaml(bootstrap(settings))
    if options.output is None:
        print(text, end="")
    else:
        options.output.write_text(text, encoding="utf-8")


def _health(options: argparse.Namespace) -> int:
    from extproc.adapters.probe import probe  # noqa: PLC0415

    problem = probe(options.address, service=options.service)
    if problem is None:
        return 0
    print(f"extproc: {options.address}: {problem}", file=sys.stderr)
    return _UNHEALTHY


def _up(options: argparse.Namespace) -> None:
    from extproc.local import StackSettings, describe_decision, up  # noqa: PLC0415

    config = load_config(options.config) if options.config else Config()
    set_up_logging("warning")
    console = Console(highlight=False, soft_wrap=True)

    def show(line: str) -> None:
        console.print(line, markup=False)

    def show_decision(decision: Decision) -> None:
        show(describe_decision(decision))

    settings = StackSettings(
        endpoints=tuple(options.endpoint),
        policy=options.policy,
        port=options.port,
        config=config,
        envoy=options.envoy,
        on_decision=show_decision,
    )
    run_loop(up(settings, show))


def _standin(options: argparse.Namespace) -> None:
    from extproc.standin.server import RunningStandin, run_standin  # noqa: PLC0415
    from extproc.standin.settings import StandinSettings  # noqa: PLC0415

    def tell(standin: RunningStandin) -> None:
        print(f"stand-in engine at {standin.url}", flush=True)

    names = ("model", "engine", "prefill_tokens_per_s", "decode_tokens_per_s", "cache_tokens")
    given = {name: getattr(options, name) for name in names}
    try:
        settings = StandinSettings(**{name: one for name, one in given.items() if one is not None})
    except ValueError as error:
        raise ExtprocError(str(error)) from None
    run_loop(run_standin(settings, options.host, options.port, on_ready=tell))


def _load(options: argparse.Namespace) -> Config:
    from extproc.engine_urls import with_engines  # noqa: PLC0415

    config = load_config(options.config) if options.config else Config()
    return with_engines(config, options.endpoints)


def _delegate(name: str) -> Callable[[argparse.Namespace], int | None]:
    """Hand the remaining arguments to `main` of a module that is imported only then."""

    def run(options: argparse.Namespace) -> int | None:
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError as error:
            message = f"this command needs the module {error.name}, which is not installed"
            raise ExtprocError(message) from None
        code: int | None = module.main(options.rest)
        return code

    return run


def _resolve_endpoints(config: Config) -> tuple[Endpoint, ...]:
    from extproc.adapters.discovery import Discovery  # noqa: PLC0415
    from extproc.settings import discovery_settings  # noqa: PLC0415

    async def resolve() -> tuple[Endpoint, ...]:
        discovery = Discovery(discovery_settings(config), lambda _: None)
        await discovery.start()
        return discovery.known

    return asyncio.run(resolve())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="extproc", description=_DESCRIPTION, allow_abbrev=False)
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="command")
    serve = _add(commands, "serve", "serve Envoy until SIGTERM, then drain", _serve)
    check = _add(commands, "check", "validate a config file and exit", _check)
    serve.add_argument("--workers", type=_count, metavar="N", help=_WORKERS_HELP)
    check.add_argument("file", type=Path, metavar="FILE")
    explain = _add(commands, "explain", "show keys and decision of one request", _explain)
    explain.add_argument("request", type=Path, metavar="REQUEST.json", help=_REQUEST_HELP)
    explain.add_argument("--path", help="HTTP path of the request (default: guessed)")
    envoy = _add_envoy_config(commands)
    _add_health(commands)
    _add_up(commands)
    _add_standin(commands)
    for command in (serve, explain, envoy):
        command.add_argument("--config", type=Path, metavar="FILE", help="config (YAML)")
    for command in (serve, envoy):
        command.add_argument("--endpoints", metavar="URL,URL", help=_ENDPOINTS_HELP)
    for name, text, module in _DELEGATES:
        command = _add(commands, name, text, _delegate(module), add_help=False)
        command.set_defaults(takes_rest=True)
    return parser


def _add_envoy_config(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
) -> argparse.ArgumentParser:
    envoy = _add(commands, "envoy-config", "print the Envoy bootstrap", _envoy_config)
    form = envoy.add_mutually_exclusive_group()
    form.add_argument("--format", choices=("bootstrap", "snippet"), help="default: bootstrap")
    form.add_argument("--snippet", action="store_true", help="as --format snippet")
    envoy.add_argument("--names", action="store_true", help=_NAMES_HELP)
    envoy.add_argument("--output", type=Path, metavar="FILE", help="write there, print nothing")
    return envoy


def _add_health(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    health = _add(commands, "health", "exit with 0 if a service is up, else with 1", _health)
    health.add_argument("address", metavar="ADDRESS", help=_HEALTH_HELP)
    health.add_argument("--service", default="", help="gRPC health name (default: routing)")


def _add_up(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    up = _add(commands, "up", "run Envoy, the router and stand-in engines here", _up)
    up.add_argument("--endpoint", action="append", default=[], metavar="URL", help=_ENDPOINT_HELP)
    up.add_argument("--policy", choices=_POLICIES, help="default: as in the config, or tiered")
    up.add_argument("--port", type=_port, default=8080, help="port of Envoy; 0 for a free one")
    up.add_argument("--envoy", metavar="PATH", help="the Envoy binary (default: found)")
    up.add_argument("--config", type=Path, metavar="FILE", help="config (YAML)")


def _add_standin(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    standin = _add(commands, "standin", "run one stand-in engine", _standin)
    standin.add_argument("--host", default="127.0.0.1")
    standin.add_argument("--port", type=_port, default=0, help="default: a free one")
    standin.add_argument("--model", help="the model it serves")
    standin.add_argument("--dialect", dest="engine", metavar="NAME", help=_DIALECT_HELP)
    standin.add_argument("--prefill-tokens-per-s", type=float, metavar="RATE")
    standin.add_argument("--decode-tokens-per-s", type=float, metavar="RATE")
    standin.add_argument("--cache-tokens", type=int, metavar="N", help="size of its prefix cache")


def _add(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    text: str,
    run: Callable[[argparse.Namespace], int | None],
    *,
    add_help: bool = True,
) -> argparse.ArgumentParser:
    command = commands.add_parser(
        name, help=text, description=text, allow_abbrev=False, add_help=add_help
    )
    command.set_defaults(run=run, takes_rest=False)
    return command


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 1 <= int(text) <= MAX_WORKERS):
        message = f"not a number from 1 to {MAX_WORKERS}: {text}"
        raise argparse.ArgumentTypeError(message)
    return int(text)


def _port(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) > _MAX_PORT:
        message = f"a port is a number from 0 to {_MAX_PORT}"
        raise argparse.ArgumentTypeError(message)
    return int(text)


_DESCRIPTION = "Prompt-cache-aware endpoint choice for Envoy."
_REQUEST_HELP = "a request body, or an object of path, headers and body"
_ENDPOINT_HELP = "an engine, http://host:port; give it once for each (default: four stand-ins)"
_ENDPOINTS_HELP = "the engines, in place of the list in the config"
_NAMES_HELP = "leave host names of endpoints to Envoy, which resolves them again and again"
_WORKERS_HELP = "processes that serve, at the listen address and those after it"
_DIALECT_HELP = "the engine it passes for: vllm (default), sglang or trtllm"
_HEALTH_HELP = "gRPC health at host:port or unix:/path, or a URL to GET"
_DELEGATES: Iterable[tuple[str, str, str]] = (
    ("demo", "compare round-robin with tiered on a seeded workload", "extproc.demo"),
    ("simulate", "run policies on a trace in virtual time", "extproc.simulate"),
)
