"""`python -m dataplane` is `dataplane`."""

import signal


def main() -> None:
    """The console script. Ctrl-C during imports ends it without a traceback."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from dataplane import cli

    signal.signal(signal.SIGINT, before)
    cli.main()


if __name__ == "__main__":
    main()
