#!/usr/bin/env python3
"""Makes the tables of README.md and docs/ from docs/results/*.json.

python scripts/make_tables.py            rewrites them
python scripts/make_tables.py --check    exits 1 if one differs from its file
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from pyvision_jax.recipes.results import make_tables  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description="Makes the tables of README.md and docs/ from docs/results/*.json.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a table differs")
    args = parser.parse_args()
    try:
        changed = make_tables(ROOT, check=args.check)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    for path in changed:
        print(f"{'differs' if args.check else 'rewritten'}: {path.relative_to(ROOT)}")
    if not changed:
        print("all tables match docs/results")
    return 1 if args.check and changed else 0


if __name__ == "__main__":
    sys.exit(main())
