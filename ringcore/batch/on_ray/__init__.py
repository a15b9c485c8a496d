"""Engines of a job on the nodes of a Ray cluster: each is an actor with an engine of its own.

The input, the results and the journal stay with the process that runs the job: so each line is answered once, whatever
node is lost.
"""
