"""Our subclasses of OpenRLHF's Ray actors: how they are made, and how a process says that it holds one.

Written against OpenRLHF 0.11.0 to 0.11.2. Each subclass overrides only what differs. The classes are undecorated, so
that Ray pickles them by reference and every worker imports their module; the driver decorates them (host/plugin.py).
"""

import os

from .. import __version__


def plain(actor_class) -> type:
    """The Python class under a `ray.remote` one."""
    return actor_class.__ray_metadata__.modified_class.__ray_actor_class__


def report_active(role: str) -> None:
    """Say that this process runs the plugin."""
    print(f"[logra] openrlhf_logra {__version__} active in the {role} (pid {os.getpid()})", flush=True)
