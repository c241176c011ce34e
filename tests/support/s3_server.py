"""An S3 server that checks keys: moto in a process of its own, with a user, a role and a token that has expired.

It is started with ``python -m tests.support.s3_server``, writes its settings as JSON, and ends when its input ends.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pyarrow.fs import LocalFileSystem, S3FileSystem, copy_files

EXPIRED = "expired-token"
"""Session token that the server refuses as expired, which moto itself never does."""
_ALL = json.dumps({"Version": "2012-10-17", "Statement": [{"Effect": "Allow", "Action": "*", "Resource": "*"}]})


@contextmanager
def s3_server() -> Iterator[dict[str, str]]:
    """Run the server, and provide the settings of a storage: the keys of a user, who may assume the role `role_arn`."""
    command = [sys.executable, "-m", "tests.support.s3_server"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment
    ) as server:
        assert server.stdin is not None and server.stdout is not None
        try:
            yield json.loads(server.stdout.readline())
        finally:
            server.stdin.close()


def upload(settings: Mapping[str, str], folder: Path, bucket: str) -> None:
    """Copy a local folder to a new bucket."""
    keys = {"access_key": settings["aws_access_key_id"], "secret_key": settings["aws_secret_access_key"]}
    endpoint = {"endpoint_override": settings["endpoint_url"], "region": settings["region_name"]}
    filesystem = S3FileSystem(**keys, **endpoint, allow_bucket_creation=True)
    filesystem.create_dir(bucket)
    copy_files(str(folder), bucket, LocalFileSystem(), filesystem)


def _main() -> None:
    os.environ["INITIAL_NO_AUTH_ACTION_COUNT"] = "5"  # those of `_user`
    import botocore.session
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    moto = DomainDispatcherApplication(create_backend_app)

    def application(environ: dict[str, Any], start_response: Callable[..., Any]) -> Any:
        if environ.get("HTTP_X_AMZ_SECURITY_TOKEN") != EXPIRED:
            return moto(environ, start_response)
        start_response("400 Bad Request", [("Content-Type", "application/xml")])
        body = b"<Error><Code>ExpiredToken</Code><Message>The provided token has expired.</Message></Error>"
        return [] if environ["REQUEST_METHOD"] == "HEAD" else [body]

    server = make_server("127.0.0.1", 0, application, threaded=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.port}"
    keys = {"aws_access_key_id": "any", "aws_secret_access_key": "any"}
    client = botocore.session.Session().create_client("iam", "us-east-1", endpoint_url=url, **keys)
    client.create_user(UserName="reader")
    client.put_user_policy(UserName="reader", PolicyName="all", PolicyDocument=_ALL)
    role = client.create_role(RoleName="reader", AssumeRolePolicyDocument=_ALL)["Role"]["Arn"]
    client.put_role_policy(RoleName="reader", PolicyName="all", PolicyDocument=_ALL)
    key = client.create_access_key(UserName="reader")["AccessKey"]
    settings = {
        "aws_access_key_id": key["AccessKeyId"],
        "aws_secret_access_key": key["SecretAccessKey"],
        "region_name": "us-east-1",
        "endpoint_url": url,
        "role_arn": role,
    }
    print(json.dumps(settings), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    _main()
