# wrong in the file: import-error
import os
import signal
from pathlib import Path

from airflow.sdk import dag


@dag(schedule=None)
def ends_its_process(): ...


if not os.fork():
    Path(os.environ["CHILD_FILE"]).write_text(str(os.getpid()))
    signal.pause()  # lives on, with what it has inherited
os._exit(3)
