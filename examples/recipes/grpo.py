"""Trains a model by GRPO (Shao et al. 2024, arXiv:2402.03300) with a reward that a function computes, with TRL.

    python examples/recipes/grpo.py --output_dir out/grpo
    python examples/recipes/grpo.py --use_vllm --vllm_mode colocate --output_dir out/grpo

Takes every option of trl.GRPOConfig, trl.ModelConfig and trl.ScriptArguments. The data has a column `prompt`.
"""

import liger_kernel.trl
from datasets import load_dataset
from trl import (
    GRPOConfig,
    GRPOTrainer,
    ModelConfig,
    ScriptArguments,
    TrlParser,
    get_peft_config,
    get_quantization_config,
)


def different_words(completions, **columns):
    """The share of a completion's words that it has once: put your own reward in its place."""
    texts = [each if isinstance(each, str) else each[-1]["content"] for each in completions]
    return [len({*text.split()}) / max(1, len(text.split())) for text in texts]


def main():
    parser = TrlParser((ScriptArguments, GRPOConfig, ModelConfig))
    parser.set_defaults(
        model_name_or_path="Qwen/Qwen3-0.6B",
        dataset_name="trl-lib/tldr",
        use_liger_kernel=True,
        max_completion_length=256,
        logging_steps=10,
    )
    script, training, model = parser.parse_args_and_config()
    training.model_init_kwargs = {
        "dtype": model.dtype,
        "attn_implementation": model.attn_implementation,
        "quantization_config": get_quantization_config(model),
    }
    print(liger_kernel.trl.patch())  # log-probabilities and entropies without logits
    trainer = GRPOTrainer(
        model.model_name_or_path,
        reward_funcs=different_words,
        args=training,
        train_dataset=load_dataset(script.dataset_name, split=script.dataset_train_split),
        peft_config=get_peft_config(model),
    )
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()
