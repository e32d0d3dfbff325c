"""What the fork server does once, after its imports, so that its ranks need not do it each time.

Only the fork server imports this module.
"""

import gc

from course_utils import intercept
from course_utils.launch import huge_pages

intercept.install()

# A rank's garbage collection then leaves alone what the rank shares with the fork server: each
# object that it touched would become the rank's private memory.
gc.collect()
gc.freeze()
huge_pages.gather()
