"""A user's script whose engine goes to sleep again and again, until it is ended."""

import sys

from sleeping import OPTIONS

from ringcore import LLM

if __name__ == "__main__":
    model, directory = sys.argv[1:]
    llm = LLM(model, sleep_directory=directory, **OPTIONS)
    print("asleep soon", flush=True)
    while True:
        llm.sleep()
        llm.wake_up()
