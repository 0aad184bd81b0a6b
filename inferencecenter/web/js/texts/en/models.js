// @ts-check
/** Texts of the list of models and the model picker. */

/** @satisfies {Readonly<Record<string, import("../../i18n.js").Text>>} */
const texts = {
  "models.hint": "Models load automatically when you use them.",
  "models.hint_operators": "Models load automatically when you use them. Operators choose the default model.",
  "models.hint_anew": "Models load automatically when you use them. Another model has to process the conversation again.",
  "models.busy": "The model can be changed when the answer has ended.",
  "models.none": "No models are available to you.",
  "models.default": "Default",
  "models.load": "Load",
  "models.load_one": "Load {name}",
  "models.switch": "Switch",
  "models.switch_one": "Switch to {name}",
  "models.unload": "Unload",
  "models.delete": "Delete…",
  "models.delete_one": "Delete {name}",
  "models.unload_one": "Unload {name}",
  "models.loading_one": "Loading {name}",
  "models.parameters": "{count} parameters",
  "models.context": "{count} tokens of context",
  "models.slots": { one: "{n} concurrent turn", other: "{n} concurrent turns" },
  "models.load_failed": "{name} could not be loaded: {why}",
  "models.switched": "{name} is now the default model.",
  "models.unloading": "{name} is unloaded once its turns have ended.",
  "swap.asked": "Requested…",
  "swap.draining": "Waiting for running turns of another model to free its memory",
  "swap.loading": "Loading",
};

export default texts;
