"""`python -m nanovllm.tools.evaluation`: lm-eval's command with the model type `nanovllm`.

For releases of lm-eval that do not load model types from entry points.
"""

from __future__ import annotations

from nanovllm.features.extras import check_extra

if __name__ == "__main__":
    check_extra("nanovllm.tools.evaluation", "eval", "lm_eval")
    from lm_eval.__main__ import cli_evaluate

    from nanovllm.tools.evaluation import lm_eval_model

    lm_eval_model.register()
    cli_evaluate()
