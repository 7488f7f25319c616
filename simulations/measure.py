"""`python -m simulations.measure saving --out DIR [--quick]`: what saving costs on this machine."""

import argparse
import json
import sys
from pathlib import Path

from layercheck.errors import LayerCheckError
from simulations.saving.run import measure_saving


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit code: 0 measured, 1 failed."""
    parser = argparse.ArgumentParser(prog="python -m simulations.measure", description=__doc__)
    parser.add_argument("what", choices=["saving"])
    parser.add_argument("--out", required=True, type=Path, help="folder for saving.json")
    parser.add_argument("--quick", action="store_true", help="fewer steps, about ten minutes")
    options = parser.parse_args(arguments)
    try:
        result = measure_saving(options.out, options.quick)
    except LayerCheckError as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201
        return 1
    print(json.dumps(result, indent=2))  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
