"""A broken connection may be away for long: what the tests' busy machine needs to dial anew is no loss.

Processes of a cluster import it as their server module, which has to register something; workers simply import it.
"""

from kvdist import kv
from kvdist.config import settings

settings.RECONNECT_GRACE_S = 15.0
COMMAND = 7


@kv.register_command(COMMAND)
def do_nothing(head, body, rank):
    """A command for the tests."""
