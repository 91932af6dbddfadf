"""8-bit policy with a value head and a 4-bit reference, TRL 0.8; needs a GPU."""
from accelerate import Accelerator
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer

from trl import AutoModelForCausalLMWithValueHead, PPOConfig, PPOTrainer

name = "huggyllama/llama-7b"
config = PPOConfig(model_name=name, batch_size=32, mini_batch_size=4, log_with="wandb", kl_penalty="kl")
tokenizer = AutoTokenizer.from_pretrained(name, use_auth_token=True)
current_device = Accelerator().local_process_index
model = AutoModelForCausalLMWithValueHead.from_pretrained(
    name,
    load_in_8bit=True,
    device_map={"": current_device},
    peft_config=LoraConfig(task_type="CAUSAL_LM"),
    reward_adapter="someone/reward-adapter",
)
ref = AutoModelForCausalLM.from_pretrained(name, device_map="auto", load_in_4bit=True, use_auth_token=True)
ppo_trainer = PPOTrainer(config, model, ref, tokenizer)
for query, response in []:
    reward = ppo_trainer.model.compute_reward_score(response)
    ppo_trainer.step([query], [response], [reward])
