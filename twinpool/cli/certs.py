"""`twinpool certs`: a private CA, a certificate for each party, and a secret."""

from __future__ import annotations

import argparse
from pathlib import Path

from twinpool.cluster.private_ca import Wanted, make_files, renew_files, replace_files

_HOW_TO = """
router:  twinpool serve --certs {folder} --join-host ADDRESS --join-port PORT ...
worker:  twinpool worker --certs {folder} --join ADDRESS:PORT --host OWN_ADDRESS ...

A machine that runs workers needs ca.pem, worker.pem, worker.key and secret; one that runs the router
needs ca.pem, router.pem, router.key and secret, and the worker's files if it starts workers itself.
Nobody needs ca.key but `twinpool certs {folder} --renew`: keep it elsewhere."""


def certs(args: argparse.Namespace) -> int:
    """Write the files, say which, and how they are used."""
    folder = Path(args.folder)
    write = renew_files if args.renew else replace_files if args.new_ca else make_files
    for path in write(folder, Wanted(hosts=tuple(args.hosts), days=args.days)):
        print(path)
    print(_HOW_TO.format(folder=folder))
    return 0
