"""Reads run directories and shows their results: the HTML report, figures, and exported networks.

A page of one run or several: `polyfed.write_report([run, "runs/b", comparison], out="page.html")`.
"""
