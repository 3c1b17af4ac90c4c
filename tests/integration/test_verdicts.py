"""What the scheduler says of slow members of a real job."""

from __future__ import annotations


def test_a_worker_that_sleeps_is_named_when_that_is_known_and_at_the_end(job, tmp_path):
    job.launch(3, 2, "sleeping.py", str(tmp_path / "said"), "1")
    named = r"sched │ worker-1 \(\S+\) computes \d+\.\dx slower than the others?, since \D*\d*\."
    job.match("launcher", rf"{named} A round takes .* With --policy quota:\d+,local_steps .*")
    (tmp_path / "said").touch()
    job.match("launcher", rf"{named} The job has waited .* s for it in all\.")
    job.succeed()
