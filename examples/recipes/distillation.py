"""Distils a model from a larger one on its own answers to prompts, with TRL.

    python examples/recipes/distillation.py --teacher_model_name_or_path Qwen/Qwen3-4B --output_dir out/distillation

Takes every option of trl.DistillationConfig, trl.ModelConfig and trl.ScriptArguments. The data has a column `prompt`.
"""

import liger_kernel.trl
from datasets import load_dataset
from trl import (
    DistillationConfig,
    DistillationTrainer,
    ModelConfig,
    ScriptArguments,
    TrlParser,
    get_peft_config,
    get_quantization_config,
)


def main():
    parser = TrlParser((ScriptArguments, DistillationConfig, ModelConfig))
    parser.set_defaults(
        model_name_or_path="Qwen/Qwen3-0.6B",
        teacher_model_name_or_path="Qwen/Qwen3-4B",
        dataset_name="trl-lib/tldr",
        use_liger_kernel=True,
        beta=0.5,
        max_completion_length=256,
        logging_steps=10,
    )
    script, training, model = parser.parse_args_and_config()
    training.model_init_kwargs = {
        "dtype": model.dtype,
        "attn_implementation": model.attn_implementation,
        "quantization_config": get_quantization_config(model),
    }
    print(liger_kernel.trl.patch())  # the divergence without either model's logits
    trainer = DistillationTrainer(
        model.model_name_or_path,
        training.teacher_model_name_or_path,
        args=training,
        train_dataset=load_dataset(script.dataset_name, split=script.dataset_train_split),
        peft_config=get_peft_config(model),
    )
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()
