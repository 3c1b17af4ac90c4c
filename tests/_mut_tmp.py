import logging

logging.disable(logging.ERROR)
from tests.core.test_simulation import MUTANTS, seeds_to_notice
import sys

for name in [
    "reports of progress are added up",
    "a lost worker is waited for under a quota",
    "what was due before all went back still is",
    "a server goes back and knows of progress after that",
    "who has the slices of a lost server hears of no progress",
    "workers are counted by their reports",
    "each slice closes a version when all but one have pushed it",
    "a lost worker is one of those that a version needs",
    "a quorum that is not there any more is waited for",
    "each slice judges how late a gradient is",
    "a worker may be any number of steps ahead",
    "the slowest may be a lost worker",
    "who joins begins at the first step",
]:
    print("|", name, "|", MUTANTS[name][0], "|", seeds_to_notice(*MUTANTS[name]), "|", flush=True)
