// @ts-check
/** Texts of the list of models and the model picker. */

/** @type {import("../../i18n.js").PartOf<"models">} */
const texts = {
  "models.hint": "Modelle werden bei Gebrauch automatisch geladen.",
  "models.hint_operators": "Modelle werden bei Gebrauch automatisch geladen. Das Standardmodell wählen Betreiber.",
  "models.hint_anew": "Modelle werden bei Gebrauch automatisch geladen. Ein anderes Modell liest die Unterhaltung neu.",
  "models.busy": "Das Modell kann gewechselt werden, sobald die Antwort beendet ist.",
  "models.none": "Ihnen stehen keine Modelle zur Verfügung.",
  "models.default": "Standard",
  "models.load": "Laden",
  "models.load_one": "{name} laden",
  "models.switch": "Wechseln",
  "models.switch_one": "Zu {name} wechseln",
  "models.unload": "Entladen",
  "models.delete": "Löschen …",
  "models.delete_one": "{name} löschen",
  "models.unload_one": "{name} entladen",
  "models.loading_one": "{name} wird geladen",
  "models.parameters": "{count} Parameter",
  "models.context": "{count} Token Kontext",
  "models.slots": { one: "{n} Anfrage gleichzeitig", other: "{n} Anfragen gleichzeitig" },
  "models.load_failed": "{name} konnte nicht geladen werden: {why}",
  "models.switched": "{name} ist jetzt das Standardmodell.",
  "models.unloading": "{name} wird entladen, sobald seine Anfragen beendet sind.",
  "swap.asked": "Angefordert …",
  "swap.draining": "Warten, bis laufende Anfragen eines anderen Modells dessen Speicher freigeben",
  "swap.loading": "Wird geladen",
};

export default texts;
