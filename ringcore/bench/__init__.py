"""`ringcore bench`: a model's latency, throughput and service load, in this process or behind a URL.

options.py ─▶ run.py: prompts.py and load.py on a target (targets.py) ─▶ figures.py, chart.py
"""
