"""The model runners: input batch, forward pass (eager or as CUDA graphs), sampling."""
