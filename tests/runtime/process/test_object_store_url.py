"""Clients of object stores."""

import os
import subprocess
import sys


def test_flyte_2_does_not_change_the_client_of_a_store():
    """Its SDK registers clients that know no `key`."""
    code = (
        "import flyte.storage._storage\n"
        "from tasks.runtime.process.object_store_url import open_url\n"
        "filesystem, path = open_url('s3://bucket/run', 'checkpoint.url')\n"
        "print(type(filesystem).__module__, filesystem.key, path)"
    )
    settings = os.environ | {"FSSPEC_S3_KEY": "one", "FSSPEC_S3_SECRET": "two"}
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], env=settings, text=True, capture_output=True)
    assert done.stdout.split() == ["s3fs.core", "one", "bucket/run"], done.stderr
