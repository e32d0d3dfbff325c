"""What the fork server does once, after its imports, so that its ranks need not do it each time.

Only the fork server imports this module.
"""

import gc
import logging

import torch.distributed as dist

from course_utils import hardware
from course_utils.comm import intercept, private, versions
from course_utils.launch.ranks import huge_pages

intercept.install()
versions.quieten()
logging.getLogger(private.PIPELINE_LOG).setLevel(logging.ERROR)
# It would list its parameters at each backward. A change of a level looks at all loggers, a tenth of what
# starting a rank costs: a rank makes one only where it is asked for more words.
logging.getLogger(private.FSDP_LOG).setLevel(logging.ERROR)
hardware.compute_alike()
# PyTorch registers gloo when somebody asks for it, and looks through all packages that are
# installed; where a group is made it empties these tables, which only torch.compile fills again.
dist.is_backend_available("cpu:gloo")
private.forget_compiled()

# A rank's garbage collection then leaves alone what the rank shares with the fork server: each
# object that it touched would become the rank's private memory.
gc.collect()
gc.freeze()
huge_pages.gather()
