"""What a finished run looked like: its metrics and its summary, as a table, a picture and a page.

    reader.py    event files and summary.json -> Run
    summary.py   Run.summary -> the rows of the table, the facts of the run; no plotting library needed
    panels.py    the declarative list of panels, and how one is drawn
    page.py      the HTML page

Only `reader` needs tensorboard and only `panels` needs matplotlib; both import them when called (extra `report`).
"""


class ReportError(Exception):
    """A run that cannot be reported on; the message is the one line that the user sees."""
