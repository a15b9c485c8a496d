"""A model class of lm-evaluation-harness (extra `lm-eval`), `python -m ringcore.lm_eval --model ringcore`.

In Python `import ringcore.lm_eval.model` registers it. `likelihoods.py` needs no lm-eval.
"""
