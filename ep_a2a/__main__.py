"""`python -m ep_a2a demo`: see `ep_a2a/demo.py`."""

import sys


def main() -> int:
    """Run the named command. Returns the exit code."""
    if sys.argv[1:2] != ["demo"]:
        print("usage: python -m ep_a2a demo [--help]", file=sys.stderr)
        return 2
    try:
        from ep_a2a import demo
    except ModuleNotFoundError as error:
        if error.name != "rich":
            raise
        print("the demo prints with rich: pip install rich", file=sys.stderr)
        return 2
    return demo.main(sys.argv[2:])


if __name__ == "__main__":
    sys.exit(main())
