"""What the process of a command returns, where it is not what the command found."""

FAILED, USAGE, INTERRUPTED = 1, 2, 130  # 130 is what a shell says of Ctrl-C
