"""torch names each event of a rendezvous after its caller, whom it finds by `inspect.stack`.

That looks through all imported modules for each frame whose file is none of theirs, as those of `python -m` and of a
fork of the tests' server: half a second for an event. In a pod, whose program is a file, it takes a millisecond.
"""

import sys

from torch.distributed.elastic.rendezvous import dynamic_rendezvous


def name_methods_cheaply():
    """Spare the agents of this process, and of its forks, that time."""
    dynamic_rendezvous.get_method_name = lambda depth=2: sys._getframe(depth).f_code.co_name
