"""The asv suites: neighbors (beside other libraries), launch (plans, pipelines, workspace), imports."""
