"""Fine-tunes a model on conversations, with TRL.

    python examples/recipes/sft.py --output_dir out/sft
    python examples/recipes/sft.py --model_name_or_path Qwen/Qwen3-8B --use_peft --lora_r 16 --output_dir out/sft

Takes every option of trl.SFTConfig, trl.ModelConfig and trl.ScriptArguments.
"""

import liger_kernel.trl
from datasets import load_dataset
from trl import ModelConfig, ScriptArguments, SFTConfig, SFTTrainer, TrlParser, get_peft_config, get_quantization_config


def main():
    parser = TrlParser((ScriptArguments, SFTConfig, ModelConfig))
    parser.set_defaults(
        model_name_or_path="Qwen/Qwen3-0.6B",
        dataset_name="trl-lib/Capybara",
        use_liger_kernel=True,
        # Layers keep for backward what fits into the GPU, instead of running again, all of them.
        liger_kernel_config={"memory_budget": "auto"},
        gradient_checkpointing=False,
        max_length=2048,
        logging_steps=10,
    )
    script, training, model = parser.parse_args_and_config()
    training.model_init_kwargs = {
        "dtype": model.dtype,
        "attn_implementation": model.attn_implementation,
        "quantization_config": get_quantization_config(model),
    }
    print(liger_kernel.trl.patch())  # the loss without logits
    trainer = SFTTrainer(
        model.model_name_or_path,
        training,
        train_dataset=load_dataset(script.dataset_name, split=script.dataset_train_split),
        peft_config=get_peft_config(model),
    )
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()
