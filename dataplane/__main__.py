"""`python -m dataplane` is `dataplane`."""

import signal


def main() -> None:
    """Run the command line. Ctrl-C during imports ends the process without a traceback."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from dataplane import cli

    signal.signal(signal.SIGINT, before)
    cli.main()


if __name__ == "__main__":
    main()
