"""Launch files of training frameworks, in and out. One table per framework, read in two directions.

`read_launch_file` recognises a file by its content; `write_launch_file` writes one file, launch arguments included.
"""

from __future__ import annotations

from results.launchers.job import Given, Imported, Job
from results.launchers.recognise import FRAMEWORKS, read_launch_file, write_launch_file

__all__ = ["FRAMEWORKS", "Given", "Imported", "Job", "read_launch_file", "write_launch_file"]
