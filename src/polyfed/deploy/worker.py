"""Starts a site's long-lived process; the SuperNode starts this module by its name.

The code is in `polyfed.deploy.site.process.worker`.
"""

from polyfed.deploy.site.process.worker import run_site_process_on_inherited_socket

if __name__ == "__main__":
    run_site_process_on_inherited_socket()
