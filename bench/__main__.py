"""`python -m bench`: measure what the router costs on this machine and print one table."""

from __future__ import annotations

import argparse
import json

from bench import decision, gateway, memory, parts, speed
from bench.figures import as_json, describe_machine, print_table

_PARTS = {
    "decision": decision.measure,
    "gateway": gateway.measure,
    "memory": memory.measure,
    "parts": parts.measure,
    "speed": speed.measure,
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(_PARTS)}; all")
    parser.add_argument("--quick", action="store_true", help="under 20 s, with rough figures")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    options = parser.parse_args()
    unknown = set(options.parts) - _PARTS.keys()
    if unknown:
        parser.error(f"no such part: {', '.join(sorted(unknown))}")
    machine = describe_machine()
    figures = [
        figure
        for name, measure in _PARTS.items()
        if name in options.parts or not options.parts
        for figure in measure(quick=options.quick)
    ]
    if options.json:
        print(json.dumps({"machine": machine, "figures": as_json(figures)}, indent=2))
    else:
        print_table(figures, machine)


if __name__ == "__main__":
    main()
