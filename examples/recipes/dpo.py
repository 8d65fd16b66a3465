"""Trains a model on preferences by DPO (Rafailov et al. 2023, arXiv:2305.18290), with TRL.

    python examples/recipes/dpo.py --output_dir out/dpo

Takes every option of trl.DPOConfig, trl.ModelConfig and trl.ScriptArguments.
"""

import liger_kernel.trl
from datasets import load_dataset
from trl import DPOConfig, DPOTrainer, ModelConfig, ScriptArguments, TrlParser, get_peft_config, get_quantization_config


def main():
    parser = TrlParser((ScriptArguments, DPOConfig, ModelConfig))
    parser.set_defaults(
        model_name_or_path="Qwen/Qwen3-0.6B",
        dataset_name="trl-lib/ultrafeedback_binarized",
        use_liger_kernel=True,
        logging_steps=10,
    )
    script, training, model = parser.parse_args_and_config()
    training.model_init_kwargs = {
        "dtype": model.dtype,
        "attn_implementation": model.attn_implementation,
        "quantization_config": get_quantization_config(model),
    }
    print(liger_kernel.trl.patch())  # log-probabilities without logits
    trainer = DPOTrainer(
        model.model_name_or_path,
        args=training,
        train_dataset=load_dataset(script.dataset_name, split=script.dataset_train_split),
        peft_config=get_peft_config(model),
    )
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()
