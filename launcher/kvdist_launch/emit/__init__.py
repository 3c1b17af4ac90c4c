"""A job as text for other systems that start processes: shells, Slurm, Open MPI, Kubernetes.

Pure: a plan comes in, text comes out. Values that a user gave are quoted for the language they end up in and never
interpreted in it.
"""
