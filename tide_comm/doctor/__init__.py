"""`tide doctor`: what this machine has, what TIDE needs of it, what falls back, and how to mend it.

Readers (`read_*.py`) gather facts (`facts.py`) within time limits; checks (`check_*.py`) are pure functions from facts to findings, so that
every machine can be tried on a laptop; `outcome.py` says what TIDE will do, by the same rules as `attach`.
"""
