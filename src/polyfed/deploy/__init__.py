"""A federation between real sites: what the server does (`server`), what a site does (`site`), what a site adds to what it
sends (`privacy`), what travels between them (`wire`), a project that runs it (`project`, `trial`), and what is wrong in its
folders (`doctor`).

Nothing here knows what carries the messages; that is `polyfed.deploy.flower.engine`, and at a site `supernode`, which hands them to
the site's process, `worker`. `link` starts Flower's server with a password.
"""
