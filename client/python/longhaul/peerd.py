"""Runs the daemon of a host: `python -m longhaul.peerd` takes the arguments of `longhaul-peerd`.

The program takes the place of the Python process, so it gets the signals, and its exit code is that of the command.
Without the program, which the extra longhaul[daemons] installs, the command says so and ends with 1.
"""

from ._programs import run_program

if __name__ == "__main__":
    run_program("longhaul-peerd")
