"""Starts every process of a kvdist job and ends them all: the command ``kvdist-launch``.

The package is made of a pure middle and a thin rim. `plan` decides what runs, `course` decides when a job has
failed and who is told to end; neither touches a process. `local` and `supervisor` start and watch real ones.
Of kvdist only `config`, `nodes` and `errors` are used, so the command starts in a few milliseconds.
"""
